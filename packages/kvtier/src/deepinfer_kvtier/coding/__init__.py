"""What is done to bytes on their way to storage: compression, encryption."""
