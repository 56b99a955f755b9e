"""Model families: one file each, holding its equations. `loader.load_model` is the way in."""
