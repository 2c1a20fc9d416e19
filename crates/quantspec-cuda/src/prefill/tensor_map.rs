//! TMA descriptors of a prompt's matrices and heads.

use crate::device::Arg;
use cudarc::driver::sys;
use quantspec_core::config::Dtype;
use quantspec_core::{Error, Result};

/// A CUtensorMap: the TMA descriptor of a tensor.
#[repr(C, align(64))]
pub(super) struct TensorMap([u8; 128]);

const _: () = assert!(size_of::<TensorMap>() == size_of::<sys::CUtensorMap>());

impl TensorMap {
    pub(super) fn arg(&self) -> Arg<'_> {
        Arg::Bytes(&self.0)
    }

    /// Row-major `[rows][width]` with a pitch in elements, in boxes of `[columns, rows]`, swizzled by 128 bytes.
    pub(super) fn matrix(
        element: Dtype,
        address: u64,
        width: usize,
        rows: usize,
        pitch: usize,
        part: [u32; 2],
    ) -> Result<TensorMap> {
        TensorMap::new(element, address, [width, rows], [pitch * element.bytes()], part, true)
    }

    /// `heads` of `d` channels of `[rows]` rows, in boxes of 64 channels and `part` rows, swizzled by 128 bytes.
    pub(super) fn heads(
        element: Dtype,
        address: u64,
        d: usize,
        rows: usize,
        heads: usize,
        pitch: usize,
        part: u32,
    ) -> Result<TensorMap> {
        TensorMap::new(
            element,
            address,
            [d, rows, heads],
            [pitch * element.bytes(), d * element.bytes()],
            [64, part, 1],
            true,
        )
    }

    /// A weight matrix `[n][k]` in atoms, in boxes of one k block and `part` times 16 rows. The atoms are stored swizzled.
    pub(super) fn atoms(element: Dtype, address: u64, n: usize, k: usize, part: u32) -> Result<TensorMap> {
        let blocks = k.div_ceil(64);
        let sizes = [64, 16, blocks, n.div_ceil(16)];
        TensorMap::new(element, address, sizes, [128, 2048, blocks * 2048], [64, 16, 1, part], false)
    }

    fn new<const RANK: usize, const STRIDES: usize>(
        element: Dtype,
        address: u64,
        sizes: [usize; RANK],
        strides: [usize; STRIDES],
        part: [u32; RANK],
        swizzle: bool,
    ) -> Result<TensorMap> {
        let mut map = TensorMap([0; 128]);
        let element = match element {
            Dtype::Bf16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Dtype::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Dtype::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        let (sizes, strides) = (sizes.map(|size| size as u64), strides.map(|stride| stride as u64));
        let steps = [1u32; RANK];
        // SAFETY: every array has the rank's length (strides one less), and the map has the driver's size and alignment.
        let status = unsafe {
            sys::cuTensorMapEncodeTiled(
                std::ptr::from_mut(&mut map).cast(),
                element,
                RANK as u32,
                address as *mut std::ffi::c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                part.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                if swizzle {
                    sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B
                } else {
                    sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE
                },
                sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        if status == sys::CUresult::CUDA_SUCCESS {
            Ok(map)
        } else {
            Err(Error::internal(format!("tensor map of {sizes:?} in parts of {part:?}: {status:?}")))
        }
    }
}
