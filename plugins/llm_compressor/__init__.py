"""llm-compressor behind one thin adapter: what its releases get wrong is put right here (seen with 0.14.0.1)."""
