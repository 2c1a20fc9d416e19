//! Description of a step for the device: rows, angles, spans and choices, written by one copy.

use super::CudaBackend;
use crate::attend::{SliceAddresses, StepSlice};
use crate::device::{Pinned, Plain};
use quantspec_core::cache::G;
use quantspec_core::config::Pages;
use quantspec_core::{Error, Result};
use quantspec_model::backend::{Row, Step};
use quantspec_model::rope::RopeTable;

/// Descriptions that may be queued before the host waits for the oldest. Rounds end with a wait; only single steps queue up.
pub(super) const STAGES: usize = 4;

/// Marks the start of a step in a graph's key; larger than any address or count.
const STEP: u64 = u64::MAX;

/// A row as the kernels see it; `Row` in kernels/layout.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct DeviceRow {
    pub(super) slot: i32,
    pub(super) offset: i32,
    pub(super) position: i32,
    pub(super) token: i32,
}

// SAFETY: thirty-two-bit numbers only.
unsafe impl Plain for DeviceRow {}

/// Layout of the current step's description.
#[derive(Clone, Debug, Default)]
pub(super) struct StepLayout {
    pub(super) slices: Vec<(StepSlice, SliceAddresses)>,
    /// The slices of local layers; empty if the model has none.
    pub(super) local_slices: Vec<(StepSlice, SliceAddresses)>,
    pub(super) rows: u64,
    /// Addresses of the rows' angles: in other layers, and in local layers.
    pub(super) cos_sin: [u64; 2],
    /// Page choices to make, and their largest page count; empty if existing lists are kept.
    pub(super) choices: u64,
    pub(super) choosing: usize,
    /// Number of choices, from the first on, whose pages are scored before.
    pub(super) scoring: usize,
    pub(super) choosing_pages: usize,
    /// The step drafts, so its error flag is not read.
    pub(super) drafts: bool,
}

/// Appends values to a page-locked buffer, each aligned for the widest load.
pub(super) struct Writer<'a> {
    pub(super) pinned: &'a mut Pinned,
    pub(super) at: usize,
}

impl Writer<'_> {
    pub(super) fn put<T: Plain>(&mut self, values: &[T]) -> Result<usize> {
        let at = self.at.next_multiple_of(16);
        self.pinned.put(at, values)?;
        self.at = at + size_of_val(values);
        Ok(at)
    }
}

impl CudaBackend {
    /// Copies the description of a single step to the device.
    pub(super) fn begin(&mut self, step: &Step) -> Result<()> {
        self.stage()?;
        let mut at = 0;
        self.layout = self.describe(step, &mut at)?;
        self.layout.drafts = step.weights.is_draft();
        self.send(at)
    }

    /// Waits until the next staging buffer is free.
    pub(super) fn stage(&mut self) -> Result<()> {
        if self.staged == STAGES {
            self.device.synchronize()?;
            self.staged = 0;
        }
        Ok(())
    }

    /// Queues the copy of the first `bytes` of the staging buffer.
    pub(super) fn send(&mut self, bytes: usize) -> Result<()> {
        // SAFETY: a staging buffer is rewritten only after `stage` or the end of a round has waited for its copy.
        unsafe { self.step.description.write_pinned(0, &self.step.staging[self.staged], 0, bytes)? };
        self.staged += 1;
        Ok(())
    }

    /// Refuses steps that the buffers, planes or kernels cannot serve.
    fn check_step(&self, step: &Step) -> Result<()> {
        if step.rows.is_empty() || step.rows.len() > self.options.step_rows {
            return Err(Error::internal(format!(
                "a step of {} rows; {} are prepared",
                step.rows.len(),
                self.options.step_rows
            )));
        }
        if !self.options.planes.serve(step.view) {
            return Err(Error::internal(format!(
                "view {:?} of a cache that keeps {:?}",
                step.view, self.options.planes
            )));
        }
        if matches!(step.pages, Pages::Tokens(_)) {
            return Err(Error::internal(format!("pages {:?} of a step on a GPU", step.pages)));
        }
        Ok(())
    }

    /// Writes the description of a step into the staging buffer from `at` on.
    pub(super) fn describe(&mut self, step: &Step, at: &mut usize) -> Result<StepLayout> {
        self.check_step(step)?;
        let rows = step.rows;
        let (choices, scoring) = self.choose_lists(step)?;
        for row in rows {
            self.slot(row.slot)?;
            if row.offset >= self.sampling.pitch() || row.position / G > self.cache.pages.table(row.slot).len() {
                return Err(Error::internal(format!("row {row:?} is beyond its slot")));
            }
        }
        let with_lists = step.pages != Pages::All;
        let slots = &self.slots;
        let chosen = |slot: usize| slots.get(slot)?.as_ref()?.chosen.filter(|_| with_lists);
        let fresh = |slot: usize| choices.iter().any(|choice| choice.slot as usize == slot);
        let drafts = step.weights.is_draft() || with_lists;
        let slices = self.attend.slices(step.view, rows, chosen, fresh, drafts)?;
        let local_slices = match &self.config.local {
            Some(local) => self.attend.local_slices(step.view, rows, local.reach, drafts)?,
            None => Vec::new(),
        };

        let base = self.step.description.at(0);
        let mut writer = Writer { pinned: &mut self.step.staging[self.staged], at: *at };
        let sampling = &self.sampling;
        let device_row = |row: &Row| DeviceRow {
            slot: row.slot as i32,
            offset: row.offset as i32,
            position: row.position as i32,
            token: sampling.token(row.slot, row.offset),
        };
        let device_rows: Vec<DeviceRow> = rows.iter().map(device_row).collect();
        let mut layout = StepLayout { rows: base + writer.put(&device_rows)? as u64, ..StepLayout::default() };
        for (rope, place) in [Some(&self.rope), self.local_rope.as_ref()].into_iter().zip(&mut layout.cos_sin) {
            if let Some(rope) = rope {
                *place = base + writer.put(&angles(rope, rows, self.config.head_dim / 2))? as u64;
            }
        }
        layout.choices = base + writer.put(&choices)? as u64;
        (layout.choosing, layout.scoring) = (choices.len(), scoring);
        // Rounded up, so that rounds share a graph while a text grows by a few pages. Pages beyond a sequence's own are not
        // scored.
        let pages = choices.iter().map(|choice| choice.pages as usize).max().unwrap_or(0);
        layout.choosing_pages = pages.next_multiple_of(64).min(self.cache.pitch);
        for (slices, described) in [(slices, &mut layout.slices), (local_slices, &mut layout.local_slices)] {
            for slice in slices {
                let addresses = SliceAddresses {
                    spans: base + writer.put(&slice.spans)? as u64,
                    tiles: base + writer.put(&slice.tiles)? as u64,
                    merged: base + writer.put(&slice.merged)? as u64,
                    tables: self.cache.tables.at(0),
                    table_pitch: self.cache.pitch,
                    list_pitch: self.lists.pitch,
                    partial: self.step.partial.at(0),
                    extremes: self.step.extremes.at(0),
                };
                described.push((slice, addresses));
            }
        }
        *at = writer.at;
        Ok(layout)
    }

    /// Everything that determines a step's kernels, grids and addresses.
    pub(super) fn step_key(&self, step: &Step, layout: &StepLayout, key: &mut Vec<u64>) {
        let (kind, n) = match step.pages {
            Pages::All | Pages::Tokens(_) => (0, 0),
            Pages::Window(n) => (1, n),
            Pages::Best(n) => (2, n),
            Pages::Snap { pages: n, .. } => (3, n),
        };
        key.extend([
            STEP,
            step.weights as u64,
            step.view as u64,
            kind,
            n as u64,
            step.rows.len() as u64,
            layout.rows,
            layout.cos_sin[0],
            layout.cos_sin[1],
            layout.choices,
            layout.choosing as u64,
            layout.scoring as u64,
            layout.choosing_pages as u64,
        ]);
        for (slice, addresses) in layout.slices.iter().chain(&layout.local_slices) {
            key.extend(slice.key());
            key.extend([addresses.spans, addresses.tiles, addresses.merged, addresses.list_pitch as u64]);
        }
    }
}

/// Cosines and sines of the rows' positions, `[row][half][cos, sin]`.
fn angles(rope: &RopeTable, rows: &[Row], half: usize) -> Vec<f32> {
    let (mut cos, mut sin) = (vec![0.0f32; half], vec![0.0f32; half]);
    let mut angles = Vec::with_capacity(rows.len() * half * 2);
    for row in rows {
        rope.fill(row.position, row.position + 1, &mut cos, &mut sin);
        angles.extend(cos.iter().zip(&sin).flat_map(|(c, s)| [*c, *s]));
    }
    angles
}
