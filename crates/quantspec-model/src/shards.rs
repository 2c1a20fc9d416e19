//! The open safetensors files (shards) of a checkpoint, as one set of tensors.

use crate::safetensors::{SafeTensors, Tensor};
use quantspec_core::{Error, Result};
use std::collections::HashMap;

/// Shards, and the shard of every tensor. A name of the set is one that its shard has.
#[derive(Debug)]
pub(crate) struct Shards {
    files: Vec<SafeTensors>,
    numbers: HashMap<String, usize>,
}

/// A tensor of a set of shards.
#[derive(Clone, Debug)]
pub(crate) struct ShardTensor {
    /// Number of its shard.
    pub(crate) shard: usize,
    pub(crate) tensor: Tensor,
}

impl Shards {
    /// A set of files; `numbers` has the file of each tensor.
    pub(crate) fn new(files: Vec<SafeTensors>, numbers: HashMap<String, usize>) -> Shards {
        Shards { files, numbers }
    }

    /// All tensors of one file.
    pub(crate) fn of(file: SafeTensors) -> Shards {
        let numbers = file.tensors().keys().map(|name| (name.clone(), 0)).collect();
        Shards { files: vec![file], numbers }
    }

    /// No tensors.
    pub(crate) fn none() -> Shards {
        Shards { files: Vec::new(), numbers: HashMap::new() }
    }

    /// The tensors' names, in no order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &String> {
        self.numbers.keys()
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.numbers.contains_key(name)
    }

    pub(crate) fn find(&self, name: &str) -> Option<ShardTensor> {
        let shard = *self.numbers.get(name)?;
        let tensor = self.files.get(shard)?.tensors().get(name)?.clone();
        Some(ShardTensor { shard, tensor })
    }

    /// Fills `out` with the bytes at `offset` of a shard.
    ///
    /// # Errors
    /// Those of [`SafeTensors::read`].
    pub(crate) fn read(&self, shard: usize, offset: u64, out: &mut [u8]) -> Result<()> {
        match self.files.get(shard) {
            Some(file) => file.read(offset, out),
            None => Err(Error::internal(format!("shard {shard} is not open"))),
        }
    }

    /// All bytes of a tensor.
    ///
    /// # Errors
    /// Those of [`SafeTensors::read`].
    pub(crate) fn bytes(&self, ShardTensor { shard, tensor }: &ShardTensor) -> Result<Vec<u8>> {
        let mut bytes = vec![0; tensor.bytes as usize];
        self.read(*shard, tensor.offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Replaces every tensor by those that `parts` makes from it, with their names. `twice` makes the error for a name that two
    /// tensors get.
    ///
    /// # Errors
    /// Those of `parts` and `twice`.
    pub(crate) fn rename(
        self,
        mut parts: impl FnMut(&str, Tensor) -> Result<Vec<(String, Tensor)>>,
        twice: impl Fn(&str) -> Error,
    ) -> Result<Shards> {
        let Shards { mut files, numbers } = self;
        let mut renamed = HashMap::with_capacity(numbers.len());
        for (number, file) in files.iter_mut().enumerate() {
            file.rename(|name, tensor| {
                if numbers.get(name) != Some(&number) {
                    return Ok(Vec::new());
                }
                let parts = parts(name, tensor)?;
                for (part, _) in &parts {
                    if renamed.insert(part.clone(), number).is_some() {
                        return Err(twice(part));
                    }
                }
                Ok(parts)
            })?;
        }
        Ok(Shards { files, numbers: renamed })
    }
}
