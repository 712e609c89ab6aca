"""Small records on disk: prompts that come in, samples that are made, manifests of both."""
