"""Pure functions of speculative decoding: sampling, acceptance, calibration, prefix scheduling."""
