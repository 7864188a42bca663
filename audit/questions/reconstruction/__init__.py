"""Can the inputs that a client trained on be rebuilt from what the server holds?"""
