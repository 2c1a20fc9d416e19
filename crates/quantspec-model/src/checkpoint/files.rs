//! Files of a checkpoint's directory: JSON, shards and their index.

use super::tensors::RECOMPUTED;
use crate::file::shown;
use crate::safetensors::SafeTensors;
use crate::shards::Shards;
use quantspec_core::{Error, ErrorKind, Result};
use serde_json::Value;
use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

/// Largest JSON file read. A config.json has some kilobytes; the index of a 405B model has 0.1 MB, that of the deepest model
/// accepted ([`crate::config::parse`]) 2 MB. Parsed JSON takes up to 16 times its bytes.
const JSON_BYTES_MAX: u64 = 4 << 20;
/// Most shards of a checkpoint; all stay open.
const SHARDS_MAX: usize = 512;

/// Returns true if the path exists. A link without a target counts as existing: a file belongs there. A folder without search
/// permission is an error, not an absent file.
fn is_there(path: &Path) -> Result<bool> {
    let refused = |message, hint: &str| Err(Error::new(ErrorKind::Io, message, hint));
    match path.try_exists() {
        Ok(true) => Ok(true),
        Ok(false) => match path.read_link() {
            Ok(target) => refused(
                format!("{} is a link to {}, which does not exist", path.display(), target.display()),
                "restore that file or remove the link; a model of the hub can be downloaded again",
            ),
            Err(_) => Ok(false),
        },
        Err(error) => refused(
            format!("cannot read {}: {error}", path.display()),
            "check its permissions and those of the folders above it",
        ),
    }
}

/// Reads a whole JSON file of the directory; None if it does not exist.
pub(super) fn read_json(dir: &Path, name: &str) -> Result<Option<Vec<u8>>> {
    let refused = |why: &str, hint: &str| {
        Error::new(ErrorKind::Io, format!("cannot read {}: {why}", dir.join(name).display()), hint)
    };
    let failed = |error: std::io::Error| refused(&error.to_string(), "check the file's permissions");
    if !is_there(&dir.join(name))? {
        return Ok(None);
    }
    // Checked before opening: opening a pipe would block.
    if !dir.join(name).metadata().map_err(failed)?.is_file() {
        return Err(refused("it is not a file", "replace it with the file that is published with the model"));
    }
    let file = File::open(dir.join(name)).map_err(failed)?;
    let mut bytes = Vec::new();
    file.take(JSON_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > JSON_BYTES_MAX {
        return Err(Error::model(
            format!("{name} is larger than {JSON_BYTES_MAX} bytes"),
            "this is not a checkpoint's file; download it again",
        ));
    }
    Ok(Some(bytes))
}

/// File that marks a LoRA adapter; its weights alone are no model.
const ADAPTER: &str = "adapter_config.json";
const MERGE: &str = "merge the LoRA adapter into its base model and save that as safetensors";

/// Opens model.safetensors or the shards of the index, or else AutoGPTQ's file.
pub(super) fn open_shards(dir: &Path) -> Result<Shards> {
    if is_there(&dir.join(ADAPTER))? {
        return Err(Error::model(format!("{} holds a LoRA adapter ({ADAPTER})", dir.display()), MERGE));
    }
    let open = |file: &Path| SafeTensors::open(file).map(Shards::of);
    let single = dir.join("model.safetensors");
    if is_there(&single)? {
        return open(&single);
    }
    let Some(index) = read_json(dir, "model.safetensors.index.json")? else {
        return open(&of_autogptq(dir).ok_or_else(|| no_weights(dir))?);
    };
    let (files, names) = read_index(&index)?;
    let mut shards = Vec::new();
    for file in files {
        let path = dir.join(&file);
        if !is_there(&path)? {
            return Err(Error::model(
                format!("shard {file} of the checkpoint is missing in {}", dir.display()),
                "the download is incomplete; fetch the missing file",
            ));
        }
        shards.push(SafeTensors::open(&path)?);
    }
    check_index(&shards, &names)?;
    Ok(Shards::new(shards, names))
}

/// The error for a wrong model.safetensors.index.json.
fn damaged_index(what: &str) -> Error {
    Error::model(format!("model.safetensors.index.json {what}"), "the file is damaged; download it again")
}

/// Parses the bytes of model.safetensors.index.json: the shards' file names, and the number of every tensor's shard.
fn read_index(index: &[u8]) -> Result<(Vec<String>, HashMap<String, usize>)> {
    let index: Value = serde_json::from_slice(index)
        .map_err(|error| damaged_index(&format!("is not valid JSON: {}", shown(&error.to_string()))))?;
    let Some(map) = index.get("weight_map").and_then(Value::as_object) else {
        return Err(damaged_index("has no weight_map"));
    };
    let mut files: Vec<String> = Vec::new();
    let mut names = HashMap::new();
    let mut numbers: HashMap<&str, usize> = HashMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str().filter(|file| is_plain_name(file)) else {
            let file = shown(&file.to_string());
            return Err(damaged_index(&format!("names the shard {file}, which is not a plain file name")));
        };
        let number = *numbers.entry(file).or_insert_with(|| {
            files.push(file.to_owned());
            files.len() - 1
        });
        names.insert(tensor.clone(), number);
    }
    if files.len() > SHARDS_MAX {
        return Err(damaged_index(&format!("names {} shards; up to {SHARDS_MAX} are opened", files.len())));
    }
    Ok((files, names))
}

/// Refuses an index that does not agree with the shards. A tensor that it omits is refused, too: transformers loads it, and
/// ignoring a head or a bias would silently change the network.
fn check_index(shards: &[SafeTensors], names: &HashMap<String, usize>) -> Result<()> {
    for (tensor, &number) in names {
        if shards.get(number).is_none_or(|shard| !shard.tensors().contains_key(tensor)) {
            let file = shards.get(number).map_or("its shard", |shard| shard.name());
            let tensor = shown(tensor);
            return Err(damaged_index(&format!("places \"{tensor}\" in {file}, which does not hold it")));
        }
    }
    for (number, shard) in shards.iter().enumerate() {
        let unnamed = |tensor: &&String| names.get(*tensor) != Some(&number) && !tensor.ends_with(RECOMPUTED);
        if let Some(tensor) = shard.tensors().keys().find(unnamed) {
            let (tensor, file) = (shown(tensor), shard.name());
            return Err(damaged_index(&format!("does not place \"{tensor}\" in {file}, which holds it")));
        }
    }
    Ok(())
}

/// Returns true if text is one plain path component: no directory, no parent, no drive.
fn is_plain_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
        && !name.contains(|c: char| matches!(c, '/' | '\\' | ':') || c.is_control())
        && name.len() <= 255
}

/// Names of a directory's entries; none if it cannot be read.
fn names_in(dir: &Path) -> Vec<String> {
    std::fs::read_dir(dir)
        .map(|entries| entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default()
}

/// The only file called as in AutoGPTQ's first versions, by bits and groups: gptq_model-4bit-128g.safetensors.
fn of_autogptq(dir: &Path) -> Option<PathBuf> {
    let mut names = names_in(dir);
    names.retain(|name| name.starts_with("gptq_model-") && name.ends_with(".safetensors"));
    let [name] = names.as_slice() else { return None };
    Some(dir.join(name))
}

/// The error for a directory without safetensors weights; it names the weights that are there.
fn no_weights(dir: &Path) -> Error {
    let names = names_in(dir);
    let any = |matches: &dyn Fn(&str) -> bool| names.iter().any(|name| matches(name));
    let hint = if any(&|name| name.ends_with(".gguf")) {
        "the directory holds GGUF files; name one of them"
    } else if any(&|name| name.starts_with("adapter_model.")) {
        MERGE
    } else if any(&|name| name.ends_with(".bin") || name.ends_with(".pth") || name.ends_with(".pt")) {
        "the directory holds pickled PyTorch weights, which can run code and are not read; convert them to safetensors"
    } else {
        "give a directory with config.json and model.safetensors, as published on the hub"
    };
    Error::model(format!("{} has neither model.safetensors nor model.safetensors.index.json", dir.display()), hint)
}
