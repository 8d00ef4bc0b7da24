"""`PipelineTrainer`: a Hugging Face causal language model in DeepSpeed pipeline stages."""
