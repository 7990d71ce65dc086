"""Small tasks that several studies share, and the loop that trains a small model on them."""
