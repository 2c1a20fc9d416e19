//! Attention of the last queries of a prompt to its pages (kernels/masses.cu), and the scores by which `Pages::Snap`
//! chooses.

use crate::args;
use crate::device::{Buffer, Device, Kernel, Launch};
use crate::shapes::MASS_THREADS;
use quantspec_core::attend::SNAP_QUERIES;
use quantspec_core::cache::{G, visible_pages};
use quantspec_core::config::ModelConfig;
use quantspec_core::plan::pages;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Block, Options};
use std::ops::Range;
use std::sync::Arc;

/// State of every slot, and of the current prompt.
#[derive(Debug)]
pub struct PageMasses {
    device: Arc<Device>,
    sums: Kernel,
    masses: Kernel,
    config: ModelConfig,
    slots: usize,
    /// Scores per list: the most pages of a sequence.
    pitch: usize,
    /// f32 `[layer][2][slot][KV head][pitch]`: masses of the prompt's pages, then the scores of
    /// [`crate::attend::Attend::choose`] at a refresh.
    pub scores: Buffer,
    /// f32 `[KV head][query][page]` of the current layer.
    of_pages: Buffer,
    /// Positions whose queries `of_pages` has.
    rows: Range<usize>,
}

impl PageMasses {
    /// Bytes of scores and of the current layer; 0 if masses are not kept.
    pub fn bytes(config: &ModelConfig, options: &Options) -> [usize; 2] {
        if !options.page_masses {
            return [0; 2];
        }
        [
            config.layers * 2 * options.slots * config.kv_heads * pages(options.capacity).max(1) * 4,
            SNAP_QUERIES * config.heads * options.prompt_capacity.max(1).div_ceil(G) * 4,
        ]
    }

    /// Allocates for a model; `None` if masses are not kept.
    ///
    /// # Errors
    /// Those of the device.
    pub fn new(device: &Arc<Device>, config: &ModelConfig, options: &Options) -> Result<Option<PageMasses>> {
        if !options.page_masses {
            return Ok(None);
        }
        let [scores, of_pages] = PageMasses::bytes(config, options);
        Ok(Some(PageMasses {
            sums: device.kernel(&format!("page_sums_{}", config.head_dim), 0)?,
            masses: device.kernel("page_masses", SNAP_QUERIES * config.group() * 4)?,
            device: device.clone(),
            config: config.clone(),
            slots: options.slots,
            pitch: pages(options.capacity).max(1),
            scores: device.zeroed(scores)?,
            of_pages: device.allocate(of_pages)?,
            rows: 0..0,
        }))
    }

    /// Bytes held.
    pub fn held_bytes(&self) -> usize {
        self.scores.bytes() + self.of_pages.bytes()
    }

    /// Address of a layer's scores, `[2][slot][KV head][pitch]`.
    pub fn of_layer(&self, layer: usize) -> u64 {
        self.scores.at(layer * 2 * self.slots * self.config.kv_heads * self.pitch * 4)
    }

    /// Clears the queries at the beginning of a prompt.
    pub fn clear(&mut self) {
        self.rows = 0..0;
    }

    /// Adds a block's queries, if they are among the prompt's last. q f16 `[rows][heads · head_dim]` of the block; kv f16
    /// `[token][2 · kv_heads · head_dim]` of the prompt up to the block's end.
    ///
    /// # Errors
    /// Device errors of the launch.
    ///
    /// # Safety
    /// q and kv must be valid until the stream has executed this call.
    pub unsafe fn add_queries(&mut self, block: &Block, q: u64, kv: u64) -> Result<()> {
        let (tokens, end) = (block.prompt.len(), block.start + block.rows);
        let first = tokens.saturating_sub(SNAP_QUERIES).max(block.start);
        if visible_pages(tokens) == 0 || first >= end {
            return Ok(());
        }
        let start = if self.rows.end == first { self.rows.start } else { first };
        self.rows = start..end;
        let config = &self.config;
        let scale = std::f32::consts::LOG2_E / (config.head_dim as f32).sqrt();
        let arguments = args![
            q + ((first - block.start) * config.q_width() * 2) as u64,
            kv,
            &self.of_pages,
            end - first,
            first,
            self.query(tokens, first),
            SNAP_QUERIES * config.group(),
            config.kv_heads,
            config.group(),
            scale
        ];
        let grid = [tokens.div_ceil(G) as u32, config.kv_heads as u32, 1];
        // SAFETY: the argument list is the kernel's; prompts have at most the planned number of tokens, and the caller
        // guarantees the rest.
        unsafe {
            self.device.launch(self.sums, Launch { grid, block: G as u32, shared: 0, overlap: false }, &arguments)
        }
    }

    /// Index of the first query of a position among those of a prompt.
    fn query(&self, tokens: usize, position: usize) -> usize {
        (position + SNAP_QUERIES - tokens) * self.config.group()
    }

    /// Ends a layer: computes masses of the pages visible after the prompt, and returns their number.
    ///
    /// # Errors
    /// [`quantspec_core::ErrorKind::Internal`] if the last queries of the prompt were not added. Device errors of the launch.
    pub fn finish(&mut self, layer: usize, slot: usize, tokens: usize) -> Result<usize> {
        let (visible, rows) = (visible_pages(tokens), std::mem::take(&mut self.rows));
        if visible == 0 {
            return Ok(0);
        }
        if rows.end != tokens || visible > self.pitch {
            return Err(Error::internal(format!("masses of {tokens} tokens by queries {rows:?}")));
        }
        let queries = SNAP_QUERIES * self.config.group();
        let first = self.query(tokens, rows.start);
        let masses = self.of_layer(layer) + (slot * self.config.kv_heads * self.pitch * 4) as u64;
        let arguments = args![&self.of_pages, masses, first, queries, tokens.div_ceil(G), visible, self.pitch];
        let shared = ((queries - first).next_multiple_of(4) * 4) as u32;
        let launch =
            Launch { grid: [self.config.kv_heads as u32, 1, 1], block: MASS_THREADS as u32, shared, overlap: false };
        // SAFETY: the argument list is the kernel's, and the buffers are this object's.
        unsafe { self.device.launch(self.masses, launch, &arguments)? };
        Ok(visible)
    }
}
