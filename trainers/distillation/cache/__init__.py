"""A teacher's answers on disk: `cache_writer.py` writes them, `teacher_cache.py` reads them."""
