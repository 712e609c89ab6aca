"""The trainer beside two others: speculators and SpecForge, each in an environment of its own."""
