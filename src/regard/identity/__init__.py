"""A persistent identity for a language model: observe, imprint, live, sleep; saved, forked, compared, rolled back."""
