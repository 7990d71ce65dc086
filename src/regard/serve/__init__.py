"""`regard serve`: a model and its identities over HTTP, as OpenAI's clients speak it.

contract.py    what an engine is: jobs in, pieces out          plain.py   the engine that does one job after another
service.py     the model, engine, store, keys and limits        app.py     the application: routers, guard, errors
routes/        one file per group of routes
"""
