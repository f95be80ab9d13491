"""What is scraped: jobs as `phasewise.toml` writes them, and the addresses that files and Kubernetes tell."""
