//! Damaged, foreign and concurrent files of draft weights: every load yields the same blocks.

use super::*;
use crate::cache_file::{ENTRY_BYTES, HEADER_BYTES};
use proptest::prelude::*;
use quantspec_core::Error;
use std::fs::{self, File, FileTimes};
use std::os::unix::fs::FileExt;
use std::time::Duration;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// A temporary folder, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("quantspec-drafts-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(path.join("model")).unwrap();
        Folder(path)
    }

    fn cache(&self) -> DraftCache {
        DraftCache {
            folder: self.0.join("drafts"),
            model: self.0.join("model"),
            smallest_bytes: 1,
            limit_bytes: u64::MAX,
        }
    }

    fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<_> = fs::read_dir(self.0.join("drafts")).unwrap().map(|e| e.unwrap().path()).collect();
        files.sort();
        files
    }

    fn file(&self) -> PathBuf {
        let files = self.files();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

const SIZES: [usize; 4] = [100, 100, 7, 1000];

/// The tests' stand-in for a backend's quantised block.
fn quantised(source: u8, size: usize) -> Vec<u8> {
    (0..size).map(|i| source.wrapping_mul(31).wrapping_add(i as u8)).collect()
}

/// One load of a model whose blocks come from these bytes. Returns the blocks, which of them were made, and their origin.
fn load_from(mut drafts: DraftBlocks, sources: [u8; 4]) -> (Vec<Vec<u8>>, Vec<usize>, Origin) {
    loop {
        let mut made = Vec::new();
        let mut block = |i: usize| {
            let mut out = vec![0; SIZES[i]];
            if !drafts.read(i, source(0, &[sources[i]]), &mut out) {
                made.push(i);
                out.copy_from_slice(&quantised(sources[i], SIZES[i]));
            }
            out
        };
        let blocks: Vec<Vec<u8>> = (0..4).map(&mut block).collect();
        if !drafts.is_sound() {
            drafts.make_all();
            continue;
        }
        let origin = drafts.save(blocks.iter().map(Vec::as_slice), |_| Ok(())).unwrap();
        return (blocks, made, origin);
    }
}

fn load(cache: &DraftCache, sources: [u8; 4]) -> (Vec<usize>, Origin) {
    let drafts = DraftBlocks::open(cache, "int4", "recipe", SIZES).unwrap();
    let (blocks, made, origin) = load_from(drafts, sources);
    for (i, block) in blocks.iter().enumerate() {
        assert_eq!(*block, quantised(sources[i], SIZES[i]), "block {i}");
    }
    assert_eq!(origin.cached + made.len(), origin.blocks);
    (made, origin)
}

const MADE: Origin = Origin { blocks: 4, cached: 0, note: None };
const CACHED: Origin = Origin { blocks: 4, cached: 4, note: None };

#[test]
fn drafts_made_once_are_read() {
    let folder = Folder::new();
    assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, MADE);
    let before = fs::read(folder.file()).unwrap();
    assert_eq!(before.len(), HEADER_BYTES + folder.description().len() + 4 * ENTRY_BYTES + SIZES.iter().sum::<usize>());
    age(&folder.file(), 2 * DAY);
    assert_eq!(load(&folder.cache(), [1, 2, 3, 4]), (vec![], CACHED));
    assert_eq!(fs::read(folder.file()).unwrap(), before);
    let used = files(&folder.0.join("drafts")).unwrap()[0].used;
    assert!(SystemTime::now().duration_since(used).unwrap() < DAY, "reading is use");
}

#[test]
fn a_changed_weight_never_meets_an_old_draft() {
    let folder = Folder::new();
    load(&folder.cache(), [1, 2, 3, 4]);
    let (made, origin) = load(&folder.cache(), [1, 2, 9, 4]);
    assert_eq!((made, origin), (vec![0, 1, 2, 3], MADE), "a changed weight changes the importance of others");
    assert_eq!(load(&folder.cache(), [1, 2, 9, 4]).1, CACHED);
    // The same bytes in another number format are different weights.
    assert_ne!(source(0, b"1234"), source(1, b"1234"));
}

#[test]
fn another_recipe_or_shape_replaces_the_file() {
    let folder = Folder::new();
    load(&folder.cache(), [1, 2, 3, 4]);
    for recipe in ["other", "recipe"] {
        let drafts = DraftBlocks::open(&folder.cache(), "int4", recipe, SIZES).unwrap();
        assert_eq!(drafts.unsaved_bytes(), 1207);
        assert_eq!(load_from(drafts, [1, 2, 3, 4]).2, MADE);
    }
    let drafts = DraftBlocks::open(&folder.cache(), "int4", "recipe", [100, 107, 1000]).unwrap();
    assert!(drafts.stored.is_none() && drafts.note.is_none());
    // Draft weights of another kind have a separate file.
    let drafts = DraftBlocks::open(&folder.cache(), "int4-mlp", "recipe", SIZES).unwrap();
    load_from(drafts, [1, 2, 3, 4]);
    assert_eq!(folder.files().len(), 2);
    assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, CACHED);
}

#[test]
fn a_sparse_file_is_not_allocated() {
    let folder = Folder::new();
    load(&folder.cache(), [1, 2, 3, 4]);
    // The index claims 4 TiB, and the sparse file is as long.
    let blocks = (1u64 << 42) / ENTRY_BYTES as u64;
    let index_at = HEADER_BYTES + folder.description().len();
    let file = File::options().write(true).open(folder.file()).unwrap();
    file.write_all_at(&blocks.to_le_bytes(), 16).unwrap();
    let length = index_at as u64 + blocks * ENTRY_BYTES as u64 + SIZES.iter().sum::<usize>() as u64;
    file.set_len(length).unwrap();
    assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, MADE);
    assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, CACHED, "a sound file took its place");
}

#[test]
fn small_drafts_are_not_kept() {
    let folder = Folder::new();
    for (smallest_bytes, kept) in [(1207, true), (1208, false)] {
        let cache = DraftCache { smallest_bytes, ..folder.cache() };
        assert_eq!(DraftBlocks::open(&cache, "int4", "recipe", SIZES).is_some(), kept);
    }
    assert!(DraftBlocks::open(&DraftCache { smallest_bytes: 0, ..folder.cache() }, "int4", "recipe", []).is_none());
}

#[test]
fn a_folder_that_cannot_be_used_is_a_note() {
    let folder = Folder::new();
    fs::write(folder.0.join("drafts"), "a file").unwrap();
    let (made, origin) = load(&folder.cache(), [1, 2, 3, 4]);
    assert_eq!(made.len(), 4);
    let note = origin.note.unwrap();
    assert!(note.contains("are not cached") && note.contains("file exists") && !note.contains("os error"), "{note}");
}

#[cfg(unix)]
#[test]
fn a_pipe_instead_of_a_file_does_not_block() {
    let folder = Folder::new();
    load(&folder.cache(), [1, 2, 3, 4]);
    let place = folder.file();
    fs::remove_file(&place).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&place).status().unwrap().success());
    let (made, origin) = load(&folder.cache(), [1, 2, 3, 4]);
    assert_eq!(made.len(), 4);
    assert!(origin.note.is_some_and(|note| note.contains("not a file")));
    assert!(fs::metadata(place).unwrap().is_file(), "a sound file took its place");
}

#[test]
fn an_interrupted_save_leaves_nothing() {
    let folder = Folder::new();
    let sizes = [POLLED_BYTES, POLLED_BYTES];
    let drafts = DraftBlocks::open(&folder.cache(), "int4", "recipe", sizes).unwrap();
    let block = vec![0; POLLED_BYTES];
    let mut seen = Vec::new();
    let saved = drafts.save([&block[..], &block].into_iter(), |done| {
        seen.push(done);
        assert_eq!(folder.files().len(), 1, "a temporary file");
        if done > POLLED_BYTES { Err(Error::interrupted()) } else { Ok(()) }
    });
    assert_eq!(saved.unwrap_err().kind, quantspec_core::ErrorKind::Interrupted);
    assert_eq!(seen, [POLLED_BYTES, 2 * POLLED_BYTES]);
    assert_eq!(folder.files(), Vec::<PathBuf>::new());
}

#[test]
fn the_least_recently_used_go_when_the_folder_is_full() {
    let folder = Folder::new();
    let cache = |model: &str| DraftCache { model: folder.0.join(model), ..folder.cache() };
    let path = |model: &str| cache(model).folder.join(file_name(&cache(model).model, "int4"));
    for (days, model) in [(5, "a"), (4, "b"), (3, "c")] {
        load(&cache(model), [1, 2, 3, 4]);
        age(&path(model), days * DAY);
    }
    let drafts = folder.0.join("drafts");
    let prefix = FORMAT.prefix;
    let left = format!("{prefix}1.2.3.tmp");
    let fresh = format!("{prefix}3.2.1.tmp");
    let head = [&FORMAT.magic[..], &[0; HEADER_BYTES]].concat();
    for name in ["notes.txt", "thesis.draft", "thesis.tmp", &left, &fresh] {
        fs::write(drafts.join(name), if name.starts_with(prefix) { &head[..] } else { b"of somebody else" }).unwrap();
        if name != fresh {
            age(&drafts.join(name), 6 * DAY);
        }
    }
    // "a" is read, so "b" is the least recently used.
    load(&cache("a"), [1, 2, 3, 4]);
    assert!(drafts.join(&left).exists(), "a load that writes nothing removes nothing");
    let bytes = fs::metadata(path("a")).unwrap().len();
    load(&DraftCache { limit_bytes: 3 * bytes, ..cache("d") }, [1, 2, 3, 4]);
    assert_eq!(["a", "b", "c", "d"].map(|model| path(model).exists()), [true, false, true, true]);
    assert!(!drafts.join(left).exists());
    for name in ["notes.txt", "thesis.draft", "thesis.tmp", &fresh] {
        assert!(drafts.join(name).exists(), "{name}");
    }
    load(&DraftCache { limit_bytes: 1, ..cache("a") }, [9, 2, 3, 4]);
    assert_eq!(["a", "c", "d"].map(|model| path(model).exists()), [true, false, false], "the new file stays");
}

#[test]
fn files_are_listed_with_model_and_use() {
    let folder = Folder::new();
    let drafts = folder.0.join("drafts");
    assert_eq!(files(&drafts).unwrap(), []);
    load(&folder.cache(), [1, 2, 3, 4]);
    let path = folder.file();
    age(&path, 2 * DAY);
    std::os::unix::fs::symlink(&path, drafts.join("link.draft")).unwrap();
    fs::create_dir(drafts.join("folder.draft")).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(drafts.join("pipe.draft")).status().unwrap().success());
    let found = files(&drafts).unwrap();
    let bytes = fs::metadata(&path).unwrap().len();
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!((&found[0].path, &found[0].model, found[0].bytes), (&path, &Some(folder.0.join("model")), bytes));
    // Listing is not use.
    assert_eq!(files(&drafts).unwrap(), found);
    let idle = SystemTime::now().duration_since(found[0].used).unwrap();
    assert!(idle > DAY && idle < 3 * DAY);
    // A file of another version is recognised as a cache file, but its model is unknown.
    File::options().write(true).open(&path).unwrap().write_all_at(&[99], 8).unwrap();
    assert_eq!(files(&drafts).unwrap()[0].model, None);
    assert!(files(&path).is_err(), "a file is no folder");
}

/// Sets the last use of a file back by this much.
fn age(path: &Path, by: Duration) {
    let then = SystemTime::now() - by;
    let times = FileTimes::new().set_modified(then).set_accessed(then);
    File::options().write(true).open(path).unwrap().set_times(times).unwrap();
}

#[test]
fn processes_may_share_a_folder() {
    let folder = Folder::new();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for round in 0..20 {
                    let note = load(&folder.cache(), [round, 2, 3, 4]).1.note;
                    assert_eq!(note, None);
                }
            });
        }
    });
    folder.file();
}

#[test]
fn file_names_are_readable_and_unique() {
    let name = |path: &str| file_name(Path::new(path), "int4");
    let hub = name("/cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/4e20de362430cd3b72f300e6b0f18e50e7166e08");
    assert!(hub.starts_with("meta-llama--Llama-3.2-1B-int4-") && hub.ends_with(".draft"), "{hub}");
    assert_ne!(hub, name("/cache/hub/models--meta-llama--Llama-3.2-1B/snapshots/0000"));
    assert!(name("/models/ein Modell\n").starts_with("ein_Modell_-int4-"));
    assert!(name(&format!("/{}", "é".repeat(500))).len() < 150);
    assert!(name("/").starts_with("-int4-"));
}

impl Folder {
    fn description(&self) -> Vec<u8> {
        format!("recipe\n{}", self.0.join("model").display()).into_bytes()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn no_damage_reaches_a_block(at in any::<prop::sample::Index>(), change in 1u8.., how in 0..4) {
        let folder = Folder::new();
        load(&folder.cache(), [1, 2, 3, 4]);
        let path = folder.file();
        let sound = fs::read(&path).unwrap();
        let mut bytes = sound.clone();
        let at = at.index(bytes.len());
        match how {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, change),
            2 => bytes[at..].fill(0), // the state after a power failure
            _ => bytes[at] ^= change,
        }
        // Zeros where zeros were.
        prop_assume!(bytes != sound);
        fs::write(&path, &bytes).unwrap();
        let (made, origin) = load(&folder.cache(), [1, 2, 3, 4]);
        prop_assert!(!made.is_empty());
        // Another version is no damage; every other change is reported.
        let version = bytes.len() < 12 || bytes[8..12] != FORMAT.version.to_le_bytes();
        prop_assert!(origin.note.is_some() || version);
        if let Some(note) = origin.note {
            prop_assert!(note.contains("damaged") && note.contains("made again"), "{}", note);
        }
        prop_assert_eq!(load(&folder.cache(), [1, 2, 3, 4]).1, CACHED);
    }
}
