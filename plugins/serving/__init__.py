"""Serving engines: installed versions, checks, and starting them."""
