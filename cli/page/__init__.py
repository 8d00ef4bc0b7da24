"""The page of `shardwright ui`: `server.py` serves it, `app.py` builds it; what it knows lies in its address."""
