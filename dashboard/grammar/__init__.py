"""What can be said on the command line: one function a verb, which adds its options. What verbs do stands in `commands/`."""
