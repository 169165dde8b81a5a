"""Training programs and the trainer that runs them."""
