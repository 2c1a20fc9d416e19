//! The reference [`Backend`]: plain candle tensors in f32, slow.
//!
//! Every operation follows its definition literally, so fast backends can be compared with it. Decode rows are computed one
//! at a time, which makes them row-invariant by construction. The cache holds canonical pages
//! ([`quantspec_core::quantize::Page`]) and f16 buffers. Weights are the checkpoint's values in f32; draft weights are
//! dequantised codes.

mod kv_cache;
mod network;
mod weights;

use crate::backend::{Backend, DeviceSeconds, Executor, Hooks, HostSampler, Memory, Options, SamplesOnHost};
use crate::checkpoint::{Checkpoint, Part};
use crate::importance::{Channel, MadeUpRows, product};
use crate::prompt_rows::PromptRows;
use crate::rope::RopeTable;
use candle_core::{Device, Tensor};
use kv_cache::Slot;
use quantspec_core::config::{DraftWeights, ModelConfig, TargetWeights};
use quantspec_core::page_pool::PagePool;
use quantspec_core::quantize::Page;
use quantspec_core::{Error, Result};
use std::collections::HashMap;
use std::ops::Range;
use weights::{draft_values, hierarchy_values};

/// A model in plain tensors.
pub struct ReferenceBackend {
    config: ModelConfig,
    options: Options,
    hooks: Hooks,
    rope: RopeTable,
    /// Of local layers.
    local_rope: Option<RopeTable>,
    /// Weights in f32: matrices `[outputs][inputs]`, vectors `[n]`.
    full: HashMap<Part, Tensor>,
    /// Dequantised draft weights. A missing part drafts with its full weights.
    draft: HashMap<Part, Tensor>,
    slots: Vec<Option<Slot>>,
    /// Page tables and counts alone: every slot has its own copy of a shared page.
    page_pool: PagePool,
    sampler: HostSampler,
    /// Hidden states of the current step, `[1][hidden]` per row.
    rows: Vec<Tensor>,
    /// Hidden states of the current prompt, `[1][hidden]`, by row.
    prompt: HashMap<usize, Tensor>,
    /// Result of the last operation for the next: queries, attention output, gated activations or a projection, `[rows][n]`
    /// each.
    between: Vec<Tensor>,
    /// Keys and values of the current prompt and layer, `[tokens][kv_width]` each.
    scratch: Option<(Tensor, Tensor)>,
    /// Positions and queries `[q_width]` of the prompt's last rows in the current layer, at most
    /// [`quantspec_core::attend::SNAP_QUERIES`].
    last: Vec<(usize, Vec<f32>)>,
    /// Of the last head, `[rows][vocab]`.
    logits: Vec<f32>,
    /// What [`Executor::device_seconds`] returns: `None`, unless a test plays a device.
    pub device_seconds: Option<DeviceSeconds>,
}

/// Unwraps a tensor operation. It fails only through a defect: shapes were checked when the checkpoint was opened.
fn tensor<T>(compute: impl FnOnce() -> candle_core::Result<T>) -> Result<T> {
    compute().map_err(|error| Error::internal(format!("reference backend: {error}")))
}

impl ReferenceBackend {
    /// Reads a whole checkpoint into f32 tensors and makes the draft weights.
    ///
    /// # Errors
    /// Those of [`Checkpoint::read_f32`] and of `hooks.poll`, and [`quantspec_core::ErrorKind::NotFinite`] if the range of a
    /// group of draft weights exceeds f16.
    pub fn load(checkpoint: &Checkpoint, options: &Options, mut hooks: Hooks) -> Result<ReferenceBackend> {
        let config = checkpoint.config().clone();
        let mut full = HashMap::new();
        let mut draft = HashMap::new();
        let mut parts = Part::all(&config);
        if config.tied_embeddings {
            parts.push(Part::Head); // separate even if tied: the draft's head is quantised, the embedding is not
        }
        let mut importance = Vec::new();
        if options.weights != TargetWeights::Checkpoint || options.draft_weights != DraftWeights::None {
            let here = |count: usize, work: &(dyn Fn(Range<usize>) -> Result<()> + Sync)| work(0..count);
            let product = |part: Part, x: &[Channel]| product(checkpoint, &here, part, x);
            let mut rows = MadeUpRows::new(checkpoint)?;
            importance = (0..config.layers).map(|_| rows.next_layer(&product)).collect::<Result<_>>()?;
        }
        for (done, &part) in parts.iter().enumerate() {
            let (rows, columns) = checkpoint.shape(part);
            let mut values = vec![0.0; rows * columns];
            match options.weights {
                TargetWeights::Checkpoint => checkpoint.read_f32(part, 0..rows, &mut values)?,
                _ => checkpoint.read_stored(part, 0..rows, &mut values)?,
            }
            let codes = match options.weights {
                TargetWeights::Checkpoint => draft_values(part, options, &importance, &values, columns)?,
                TargetWeights::Int8 | TargetWeights::Int4 => {
                    // The embedding of a tied model is read from the head.
                    let part = if part == Part::Embedding && config.tied_embeddings { Part::Head } else { part };
                    hierarchy_values(part, options, &importance, &mut values, columns)?
                }
            };
            if let Some(codes) = codes.filter(|_| part != Part::Embedding) {
                draft.insert(part, tensor(|| Tensor::from_vec(codes, (rows, columns), &Device::Cpu))?);
            }
            full.insert(part, tensor(|| Tensor::from_vec(values, (rows, columns), &Device::Cpu))?);
            (hooks.loading)(done + 1, parts.len());
            (hooks.poll)()?;
        }
        Ok(ReferenceBackend {
            rope: RopeTable::new(&config),
            local_rope: RopeTable::local(&config),
            slots: (0..options.slots).map(|_| None).collect(),
            page_pool: PagePool::new(options.pages(), options.slots).keeping(options.kept_pages),
            sampler: HostSampler::new(options.slots, config.vocab),
            options: options.clone(),
            config,
            hooks,
            full,
            draft,
            rows: Vec::new(),
            prompt: HashMap::new(),
            between: Vec::new(),
            scratch: None,
            last: Vec::new(),
            logits: Vec::new(),
            device_seconds: None,
        })
    }

    fn slot(&mut self, slot: usize) -> Result<&mut Slot> {
        let found = self.slots.get_mut(slot).and_then(Option::as_mut);
        found.ok_or_else(|| Error::internal(format!("slot {slot} is not open")))
    }
}

impl PromptRows for ReferenceBackend {
    fn kernels(&self) -> String {
        "reference".to_string()
    }

    /// The reference keeps a prompt's keys and values in f32.
    fn row_bytes(&self) -> usize {
        2 * self.config.kv_width() * size_of::<f32>()
    }

    fn export_rows(&mut self, tokens: Range<usize>, out: &mut [u8]) -> Result<()> {
        let Some((keys, values)) = &self.scratch else {
            return Err(Error::internal("no prompt to export"));
        };
        let rows = tensor(|| {
            Tensor::cat(&[keys, values], 1)?.narrow(0, tokens.start, tokens.len())?.flatten_all()?.to_vec1::<f32>()
        })?;
        if out.len() != rows.len() * size_of::<f32>() {
            return Err(Error::internal(format!("{} bytes of room for tokens {tokens:?}", out.len())));
        }
        out.chunks_exact_mut(4).zip(rows).for_each(|(out, x)| out.copy_from_slice(&x.to_le_bytes()));
        Ok(())
    }

    fn import_rows(&mut self, tokens: Range<usize>, bytes: &[u8]) -> Result<()> {
        let width = self.config.kv_width();
        let rows: Vec<f32> =
            bytes.chunks_exact(4).filter_map(|x| x.first_chunk().map(|x| f32::from_le_bytes(*x))).collect();
        let earlier = self.scratch.take().filter(|_| tokens.start > 0);
        self.scratch = Some(tensor(|| {
            let rows = Tensor::from_vec(rows, (tokens.len(), 2 * width), &Device::Cpu)?;
            let (keys, values) = (rows.narrow(1, 0, width)?, rows.narrow(1, width, width)?);
            match &earlier {
                None => Ok((keys, values)),
                Some((before, and)) => Ok((Tensor::cat(&[before, &keys], 0)?, Tensor::cat(&[and, &values], 0)?)),
            }
        })?);
        Ok(())
    }
}

impl SamplesOnHost for ReferenceBackend {
    fn host_sampler(&mut self) -> (&mut HostSampler, &[f32]) {
        (&mut self.sampler, &self.logits)
    }
}

impl Executor for ReferenceBackend {
    fn device_seconds(&mut self) -> Result<Option<DeviceSeconds>> {
        Ok(self.device_seconds)
    }
}

impl Backend for ReferenceBackend {
    fn memory(&self) -> Memory {
        let bytes = |tensors: &HashMap<Part, Tensor>| tensors.values().map(|tensor| tensor.elem_count() * 4).sum();
        let heads = || self.slots.iter().flatten().flat_map(|slot| slot.heads.iter().flatten());
        let pages = || heads().flat_map(|head| head.pages.iter().flatten());
        let codes = |page: &Page| page.key_upper.len() + page.value_upper.len();
        let params = |page: &Page| 4 * (page.key_params.len() + page.value_params.len());
        let quantised = || pages().filter_map(|page| page.quantised.as_ref());
        let full = pages().filter_map(|page| page.full.as_ref());
        Memory {
            weights_bytes: bytes(&self.full),
            draft_weights_bytes: bytes(&self.draft),
            cache_upper_bytes: quantised().map(|page| codes(page) + params(page)).sum(),
            cache_lower_bytes: quantised().map(codes).sum(),
            cache_full_bytes: full.map(|(keys, values)| 2 * (keys.len() + values.len())).sum(),
            buffer_bytes: heads().map(|head| 2 * (head.recent_keys.len() + head.recent_values.len())).sum(),
            workspace_bytes: self.logits.len() * 4,
            host_bytes: 0,
        }
    }

    fn draft_read_bytes(&self) -> usize {
        let read = |(part, full): (&Part, &Tensor)| self.draft.get(part).unwrap_or(full).elem_count() * 4;
        self.full.iter().map(read).sum()
    }
}
