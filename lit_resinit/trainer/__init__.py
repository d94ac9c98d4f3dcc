"""What is known of a Trainer without importing one."""
