"""Read the notes that exporters such as PyTorch's leave in their files, and undo their merging of parameters."""
