"""An engine for vision-language agents that shares one processor between encoding, prefill and decoding."""
