//! Draft weights from disk equal computed ones bit for bit, and always belong to the checkpoint's weights.

#[path = "support/random.rs"]
#[allow(dead_code, reason = "one token is enough here")]
mod random;

use quantspec_core::config::{DraftWeights, Pages, Planes, Sensitive, View, Weights};
use quantspec_cpu::CpuBackend;
use quantspec_model::backend::{Hooks, KvCache, Options, Row, Step, TokenSampler};
use quantspec_model::checkpoint::Checkpoint;
use quantspec_model::draft_cache::{DraftCache, Origin};
use quantspec_model::forward;
use random::Shape;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("quantspec-cpu-drafts-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Bits of a draft step's logits, and the origin of the draft weights.
fn load(checkpoint: Checkpoint, folder: Option<&Folder>, draft: DraftWeights, threads: usize) -> (Vec<u32>, Origin) {
    load_sensitive(checkpoint, folder, (draft, Sensitive::NONE), threads)
}

fn load_sensitive(
    mut checkpoint: Checkpoint,
    folder: Option<&Folder>,
    (draft, sensitive): (DraftWeights, Sensitive),
    threads: usize,
) -> (Vec<u32>, Origin) {
    if let Some(Folder(path)) = folder {
        let cache =
            DraftCache { folder: path.clone(), model: std::env::temp_dir(), smallest_bytes: 0, limit_bytes: u64::MAX };
        checkpoint.cache_drafts(cache);
    }
    let options = Options {
        planes: Planes::of(&[View::Both]),
        draft_weights: draft,
        sensitive,
        step_rows: 1,
        block_rows: 64,
        threads,
        ..Options::new(1, 256)
    };
    let notes = Arc::new(Mutex::new(Vec::new()));
    let slot = notes.clone();
    let hooks = Hooks { drafts: Box::new(move |origin| slot.lock().unwrap().push(origin)), ..Hooks::default() };
    let mut backend = CpuBackend::load(&checkpoint, &options, hooks).expect("load");
    backend.open(0, 256).expect("open");
    backend.set_window(0, &[7]).expect("window");
    let rows = [Row { slot: 0, offset: 0, position: 0 }];
    let step = Step { weights: Weights::Draft, view: View::Both, pages: Pages::All, choose_pages: false, rows: &rows };
    forward::step(&mut backend, &step).expect("step");
    let logits = backend.logits(0).expect("logits").iter().map(|x| x.to_bits()).collect();
    let mut notes = notes.lock().unwrap();
    assert_eq!(notes.len(), usize::from(folder.is_some()));
    (logits, notes.pop().unwrap_or_default())
}

#[test]
fn drafts_from_disk_have_the_bits_of_made_ones() {
    let shapes = [
        ("BF16", Shape { tied: false, ..Shape::new("llama", "BF16", (4, 2, 32)) }),
        ("F16", Shape::new("qwen2", "F16", (2, 1, 40))),
        ("F32", Shape { biases: true, ..Shape::new("llama", "F32", (3, 1, 40)) }),
    ];
    for (dtype, shape) in shapes {
        for draft in [DraftWeights::Int4, DraftWeights::Int4Mlp] {
            let folder = Folder::new(&format!("{dtype}-{draft:?}"));
            let (made, _) = load(shape.checkpoint(1), None, draft, 1);
            let (saved, first) = load(shape.checkpoint(1), Some(&folder), draft, 3);
            let (read, second) = load(shape.checkpoint(1), Some(&folder), draft, 2);
            assert!(made == saved && made == read, "{shape:?}");
            assert!(first.blocks > 4 && first.cached == 0 && first.note.is_none(), "{first:?}");
            assert_eq!(second, Origin { cached: first.blocks, ..first });
        }
    }
}

#[test]
fn after_a_changed_weight_all_are_quantised_again() {
    let shape = Shape { tied: false, ..Shape::new("llama", "BF16", (4, 2, 32)) };
    let folder = Folder::new("changed");
    let (before, first) = load(shape.checkpoint(1), Some(&folder), DraftWeights::Int4, 2);
    let tensors = [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "lm_head.weight",
        // Not quantised itself, but the importance of inputs depends on it.
        "model.layers.0.input_layernorm.weight",
    ];
    for tensor in tensors {
        // 1.0 among weights of a tenth.
        let changed = || shape.damaged(1, tensor, 0x3f80);
        let (want, _) = load(changed(), None, DraftWeights::Int4, 2);
        assert_ne!(want, before);
        let (got, origin) = load(changed(), Some(&folder), DraftWeights::Int4, 2);
        assert_eq!(got, want, "{tensor}");
        assert_eq!(origin, first, "all are made");
        let (got, origin) = load(changed(), Some(&folder), DraftWeights::Int4, 2);
        assert!(got == want && origin.cached == first.blocks, "{tensor}: the file was replaced");
    }
}

#[test]
fn sensitive_matrices_have_files_of_their_own() {
    let shape = Shape { tied: false, ..Shape::new("llama", "BF16", (4, 2, 32)) };
    let folder = Folder::new("sensitive");
    let choices = ["none", "down", "qkv,o"].map(|names| Sensitive::named(names).expect("kinds"));
    let made = choices.map(|kinds| load_sensitive(shape.checkpoint(1), None, (DraftWeights::Int4, kinds), 1).0);
    assert!(made[0] != made[1] && made[1] != made[2] && made[0] != made[2]);
    for cached in [false, true] {
        for (kinds, made) in choices.iter().zip(&made) {
            let (got, origin) = load_sensitive(shape.checkpoint(1), Some(&folder), (DraftWeights::Int4, *kinds), 2);
            assert!(got == *made && (origin.cached == origin.blocks) == cached && origin.note.is_none(), "{origin:?}");
        }
    }
    assert_eq!(std::fs::read_dir(&folder.0).expect("folder").count(), choices.len());
}
