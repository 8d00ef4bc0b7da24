"""DeepSpeed under the Trainer: operators, offload, AutoTP, AutoEP, Ulysses, and parameters wherever it keeps them."""
