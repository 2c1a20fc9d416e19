//! Compares any backend with the goldens of `tests/golden` (made by Hugging Face transformers, see make.py there). Tests of
//! other crates include this file by path.

use quantspec_core::config::{DraftWeights, Pages, View, Weights};
use quantspec_model::backend::{Backend, Options, Row, Step};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::forward;
use quantspec_model::safetensors::SafeTensors;
use std::path::{Path, PathBuf};

/// Rows of a decode step in [`check_steps`].
const STEP_ROWS: usize = 7;

/// One checkpoint with one of its configurations, and transformers' logits for it.
pub(crate) struct Golden {
    /// `directory/variant`, for messages.
    pub(crate) name: String,
    /// The checkpoint.
    pub(crate) checkpoint: Checkpoint,
    /// Token ids, [T].
    pub(crate) ids: Vec<u32>,
    /// Logits of the last position of every prefix, [T][vocab].
    pub(crate) prefill: Vec<Vec<f32>>,
    /// Logits of the last positions, fed one by one after a prefilled prompt, [N][vocab].
    pub(crate) steps: Vec<Vec<f32>>,
}

fn tensor(file: &SafeTensors, name: &str) -> Option<(Vec<[u8; 4]>, Vec<usize>)> {
    let tensor = file.tensors().get(name)?;
    let mut bytes = vec![0; tensor.bytes as usize];
    file.read(tensor.offset, &mut bytes).expect("golden data");
    Some((bytes.as_chunks::<4>().0.to_vec(), tensor.shape.clone()))
}

fn rows(file: &SafeTensors, name: &str) -> Option<Vec<Vec<f32>>> {
    let (values, shape) = tensor(file, name)?;
    Some(values.chunks_exact(shape[1]).map(|row| row.iter().map(|x| f32::from_le_bytes(*x)).collect()).collect())
}

fn load(directory: &Path, variant: &str) -> Golden {
    let name = format!("{}/{variant}", directory.file_name().expect("name").to_string_lossy());
    let golden = SafeTensors::open(&directory.join(format!("{variant}.golden.safetensors"))).expect("golden");
    let checkpoint = if variant == "config" {
        Checkpoint::open(directory)
    } else {
        // The tiny weights are leaked.
        let weights = std::fs::read(directory.join("model.safetensors")).expect("weights");
        let config = std::fs::read(directory.join(format!("{variant}.json"))).expect("config");
        Checkpoint::from_bytes(&config, weights.leak())
    };
    let checkpoint = checkpoint.unwrap_or_else(|error| panic!("{name}: {error} ({})", error.hint));
    let ids = tensor(&golden, "ids").expect("ids").0.iter().map(|id| u32::from_le_bytes(*id)).collect();
    let prefill = rows(&golden, "prefill").expect("prefill");
    let steps = rows(&golden, "steps").unwrap_or_else(|| prefill[prefill.len() / 4..].to_vec());
    Golden { name, checkpoint, ids, prefill, steps }
}

/// Every golden.
pub(crate) fn all() -> Vec<Golden> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../quantspec-model/tests/golden");
    let entries = std::fs::read_dir(folder).expect("goldens").map(|entry| entry.expect("entry").path());
    let mut directories: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    directories.sort();
    let mut goldens = Vec::new();
    for directory in directories {
        let entries = std::fs::read_dir(&directory).expect("golden").map(|entry| entry.expect("entry").file_name());
        let mut variants: Vec<String> = entries
            .filter_map(|name| Some(name.to_string_lossy().strip_suffix(".golden.safetensors")?.to_string()))
            .collect();
        variants.sort();
        goldens.extend(variants.iter().map(|variant| load(&directory, variant)));
    }
    assert!(goldens.len() >= 27, "only {} goldens were found", goldens.len());
    goldens
}

/// Options for running a golden with `slots` slots.
pub(crate) fn options(golden: &Golden, slots: usize) -> Options {
    Options {
        draft_weights: DraftWeights::None,
        step_rows: STEP_ROWS,
        block_rows: 16,
        ..Options::new(slots, golden.ids.len() + 1)
    }
}

/// The largest of these; NaN, which fails any comparison, if one is NaN.
pub(crate) fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |most, x| if x > most || x.is_nan() { x } else { most })
}

/// Fails if logits are further from the golden than `tolerance`, in units of the golden row's standard deviation.
fn compare(name: &str, position: usize, found: &[f32], golden: &[f32], tolerance: f32) {
    assert_eq!(found.len(), golden.len(), "{name}: vocabulary");
    let mean = golden.iter().sum::<f32>() / golden.len() as f32;
    let deviation = (golden.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / golden.len() as f32).sqrt();
    let worst = largest(found.iter().zip(golden).map(|(a, b)| (a - b).abs())) / deviation;
    assert!(
        worst <= tolerance,
        "{name}: logits at position {position} are off by {worst} deviations, {tolerance} allowed"
    );
}

/// Prompts: the last row's logits of `prompts` prefixes of various lengths, including the longest.
pub(crate) fn check_prefill<B: Backend>(backend: &mut B, golden: &Golden, prompts: usize, tolerance: f32) {
    let total = golden.ids.len();
    for index in 1..=prompts {
        let length = (total * index).div_ceil(prompts);
        backend.open(0, length).expect("open");
        forward::prefill(backend, 0, &golden.ids[..length], 16, &mut |_, _| ()).expect("prefill");
        let logits = backend.logits(0).expect("logits");
        compare(&golden.name, length - 1, &logits, &golden.prefill[length - 1], tolerance);
        backend.close(0);
    }
}

/// Decode steps of the full-precision view after a prefilled prompt, several rows at a time, committed and flushed like an
/// engine. With dynamic RoPE rows are also fed one by one, as angles depend on their own lengths.
pub(crate) fn check_steps<B: Backend>(backend: &mut B, golden: &Golden, view: View, tolerance: f32) {
    let start = golden.ids.len() - golden.steps.len();
    let mut extent = quantspec_core::cache::Extent::default();
    backend.open(0, golden.ids.len()).expect("open");
    forward::prefill(backend, 0, &golden.ids[..start], 16, &mut |_, _| ()).expect("prefill");
    extent.commit(start);
    for (index, ids) in golden.ids[start..].chunks(STEP_ROWS).enumerate() {
        backend.set_window(0, ids).expect("window");
        let first = start + index * STEP_ROWS;
        let rows: Vec<Row> = (0..ids.len()).map(|offset| Row { slot: 0, offset, position: first + offset }).collect();
        let step = Step { weights: Weights::Full, view, pages: Pages::All, choose_pages: false, rows: &rows };
        forward::step(backend, &step).expect("step");
        for row in 0..ids.len() {
            let logits = backend.logits(row).expect("logits");
            let expected = &golden.steps[index * STEP_ROWS + row];
            compare(&golden.name, first + row, &logits, expected, tolerance);
        }
        for page in extent.commit(ids.len()) {
            backend.flush(0, page).expect("flush");
        }
    }
    backend.close(0);
}
