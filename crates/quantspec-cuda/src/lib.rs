//! Backend on NVIDIA GPUs through cudarc.
