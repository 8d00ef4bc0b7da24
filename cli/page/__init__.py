"""The page of `shardwright ui`: `server.py` serves it, `app.py` builds it; its address has its state."""
