//! Launches of the page choice (kernels/pages.cu).

use super::{Attend, Layer, SliceAddresses};
use crate::args;
use crate::device::{Device, Kernel, Launch, Plain};
use crate::shapes::CHOICE_THREADS;
use quantspec_core::Result;
use quantspec_core::config::ModelConfig;

/// Input of a page choice; `PageChoice` in kernels/pages.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageChoice {
    /// Row of q whose group chooses.
    pub row: i32,
    /// Slot.
    pub slot: i32,
    /// Visible pages.
    pub pages: i32,
    /// Pages that are chosen among; those after them are all listed.
    pub scored: i32,
    /// Index of the list's scores: the slot, or at a refresh the number of slots plus the slot.
    pub scores: i32,
}

const _: () = assert!(size_of::<PageChoice>() == 20);

// SAFETY: thirty-two-bit numbers only.
unsafe impl Plain for PageChoice {}

#[derive(Debug)]
pub(super) struct PageKernels {
    /// With the pages per block: for few blocks, and for more blocks than SMs, which would not fit next to the previous GEMM.
    scores: [(Kernel, usize); 2],
    select: Kernel,
}

impl PageKernels {
    pub(super) fn new(device: &Device, config: &ModelConfig) -> Result<PageKernels> {
        let scores = |name: &str, deep: usize| -> Result<(Kernel, usize)> {
            Ok((device.kernel(name, 0)?, deep * 8 * CHOICE_THREADS / config.head_dim))
        };
        let scores = match config.group() {
            1 => [scores("scores_1_4", 4)?; 2],
            _ => [scores("scores_4_2", 2)?, scores("scores_4_4", 4)?],
        };
        Ok(PageKernels { scores, select: device.kernel("select", 0)? })
    }
}

impl Attend {
    /// Chooses pages of one layer, `n` per KV head: the first, the newest and those with the best scores, and all after
    /// [`PageChoice::scored`], into the lists of their slots. The first `scoring` choices are scored before. With `scores` 0, the
    /// newest count as best.
    ///
    /// # Errors
    /// Device errors of the two launches, named by the kernel.
    ///
    /// # Safety
    /// As [`Attend::run`]; `choices` are `count` [`PageChoice`]s, `scores` f32 `[PageChoice::scores][kv_heads][table_pitch]` or
    /// 0.
    #[expect(clippy::too_many_arguments, reason = "one address per matrix")]
    pub unsafe fn choose(
        &self,
        choices: u64,
        [count, scoring]: [usize; 2],
        pages: usize,
        n: usize,
        q: u64,
        scores: u64,
        layer: &Layer,
        addresses: &SliceAddresses,
    ) -> Result<()> {
        // SAFETY: the argument lists are the kernels'; the caller guarantees the addresses.
        unsafe {
            if scores != 0 && scoring > 0 {
                let arguments = args![
                    layer.upper,
                    addresses.tables,
                    addresses.table_pitch,
                    q,
                    choices,
                    scores,
                    addresses.table_pitch,
                    self.kv_heads,
                    self.group,
                    self.head_dim,
                    self.centre
                ];
                let blocks = |of: usize| pages.div_ceil(of) * self.kv_heads * scoring;
                let few = blocks(self.pages.scores[0].1) <= self.device.info.sms;
                let (kernel, of) = self.pages.scores[usize::from(!few)];
                let grid = [pages.div_ceil(of) as u32, self.kv_heads as u32, scoring as u32];
                self.device.launch(
                    kernel,
                    Launch { grid, block: CHOICE_THREADS as u32, shared: 0, overlap: true },
                    &arguments,
                )?;
            }
            let arguments =
                args![scores, addresses.table_pitch, choices, layer.lists, addresses.list_pitch, self.kv_heads, n];
            let grid = [self.kv_heads as u32, count as u32, 1];
            self.device.launch(
                self.pages.select,
                Launch { grid, block: CHOICE_THREADS as u32, shared: 0, overlap: true },
                &arguments,
            )
        }
    }
}
