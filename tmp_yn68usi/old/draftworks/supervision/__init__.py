"""Jobs that outlive whoever started them."""
