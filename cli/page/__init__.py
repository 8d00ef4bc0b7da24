"""The page of `shardwright ui`, from Gradio's components; `app.py` also runs as a Hugging Face Space."""
