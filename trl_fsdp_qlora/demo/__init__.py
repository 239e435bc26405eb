"""Models, rows and pictures for runs that need neither a hub nor a GPU. The trainers do not import this."""
