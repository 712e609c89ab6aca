"""What runs the target: the built-in reference engine, and clients of served engines."""
