"""What exporters such as PyTorch's leave in their files, and how it is undone."""
