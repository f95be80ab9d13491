"""How long a model's kernels take on an accelerator, by curves fitted to published measurements (the tables `efficiency`)."""
