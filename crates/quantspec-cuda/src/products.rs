//! Products of a loaded matrix with the rows of made-up texts, from which importance is computed
//! (`quantspec_model::importance`, docs/design/quantise.md).

use crate::args;
use crate::device::{Device, Kernel, Launch};
use crate::linear::{Matrix, TILE, of_dtype, of_each_dtype};
use quantspec_core::{Error, Result};
use quantspec_model::importance::{Channel, ROWS};
use std::ops::Range;
use std::sync::Arc;

/// Launches the products.
#[derive(Debug)]
pub struct Products {
    device: Arc<Device>,
    /// Of matrices in bf16, f16, f32.
    kernels: [Kernel; 3],
}

impl Products {
    /// Finds the kernels.
    ///
    /// # Errors
    /// Those of [`Device::kernel`].
    pub fn new(device: &Arc<Device>) -> Result<Products> {
        Ok(Products { kernels: of_each_dtype(device, "product")?, device: device.clone() })
    }

    /// A [`quantspec_model::importance::Product`] of some rows of a matrix, which begin with a tile. Waits for it.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] for rows that do not exist or begin inside a tile, and for other inputs than the
    /// matrix has. Those of [`Device::allocate`], of the launch and of [`crate::device::Buffer::read`].
    pub fn run(&self, weights: &Matrix, rows: Range<usize>, x: &[Channel]) -> Result<Vec<Channel>> {
        let &Matrix { ref buffer, dtype, n, k } = weights;
        if rows.end > n
            || !rows.start.is_multiple_of(TILE)
            || x.len() != k
            || buffer.bytes() < Matrix::bytes(dtype, n, k)
        {
            return Err(Error::internal(format!("rows {rows:?} of {n} times {} inputs of {k}", x.len())));
        }
        let mut found = vec![[0f32; ROWS]; rows.len()];
        let (inputs, out) = (self.device.copied(x.as_flattened())?, self.device.allocate(size_of_val(&found[..]))?);
        let arguments = args![buffer.at(Matrix::bytes(dtype, rows.start, k)), &inputs, &out, rows.len(), k];
        let launch = Launch { grid: [rows.len().div_ceil(TILE) as u32, 1, 1], block: 256, shared: 0, overlap: false };
        // SAFETY: the argument list is the kernel's, and the buffers have the sizes that it reads and writes: see above.
        unsafe { self.device.launch(of_dtype(self.kernels, dtype), launch, &arguments)? };
        out.read_into(0, found.as_flattened_mut())?;
        Ok(found)
    }
}
