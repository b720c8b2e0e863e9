"""Loading models and tokenizers, and checking that the RoPE they apply is the one asked for."""
