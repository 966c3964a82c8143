"""The plain synchronous loop: what S = 0 must equal. No Ray, no ZeroMQ, no DeepSpeed, no vLLM."""
