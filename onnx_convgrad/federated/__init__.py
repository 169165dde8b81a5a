"""Federated learning: clients train on data that stay with them, and a server averages their parameters."""
