"""What the commands do, once their options are understood, and how they show it."""
