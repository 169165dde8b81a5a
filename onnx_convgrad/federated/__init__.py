"""Federated learning (tool: may change in a minor version).

Clients train on data that stay with them, and a server averages their parameters.
"""
