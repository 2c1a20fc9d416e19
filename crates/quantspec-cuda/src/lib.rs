//! Backend on NVIDIA GPUs.
//!
//! Kernels are compiled when this crate is built; the driver is opened when a device is requested. So the library loads on
//! any machine, and [`detect()`] reports which GPUs can be used. It does not link to the CUDA runtime, cuBLAS or cuDNN.

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
pub mod masses;
mod penalty;
pub mod prefill;
pub mod products;
mod recorded;
mod sample;
mod shapes;
mod weights;

pub use backend::{CudaBackend, Limits, check, plan, plan_with};
pub use detect::{Detection, DeviceInfo, detect};
pub use images::kernels;
pub use weights::check_weights;
