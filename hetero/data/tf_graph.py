def check_dataset(d): pass
