"""CuTe execution of NVFP4-CSF expert layers: numbers in, numbers out; no files, no names, no vLLM."""
