"""Reading: what an identity does to the layers of a model, and the models it can live in."""
