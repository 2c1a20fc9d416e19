//! Backend on NVIDIA GPUs.
//!
//! The kernels are compiled when this crate is built and the driver is opened when a device is asked for, so a library built anywhere
//! loads everywhere: [`detect`] says what is there and why a GPU is off. Nothing links to the CUDA runtime, cuBLAS or cuDNN.

pub mod attend;
mod backend;
pub mod bench;
mod detect;
pub mod device;
pub mod draft;
mod flags;
pub mod hierarchy;
mod images;
pub mod linear;
mod penalty;
pub mod prefill;
mod recorded;
mod sample;
mod shapes;
mod weights;

pub use backend::{CudaBackend, check, plan};
pub use detect::{Detection, DeviceInfo, detect};
pub use images::kernels;
pub use weights::check_weights;
