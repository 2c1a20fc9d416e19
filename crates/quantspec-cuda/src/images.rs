//! The kernel images embedded by build.rs, and the choice for a device.

use quantspec_core::{Error, Result};

/// One translation unit of kernels/, compiled for one architecture.
pub(crate) struct Image {
    /// File stem: `attend`, `linear`, ...
    pub(crate) stem: &'static str,
    /// Compute capability times ten; 0 is PTX.
    pub(crate) architecture: u32,
    /// Size of the inflated image, in bytes.
    pub(crate) bytes: usize,
    /// Deflated machine code, or PTX text with its final NUL.
    pub(crate) deflated: &'static [u8],
}

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Oldest compute capability (times ten) that has an image: Turing, the first with integer tensor cores.
pub(crate) const OLDEST: u32 = 75;

/// Compute capability (times ten) that PTX is written for.
pub(crate) const PTX: u32 = 80;

/// Names of the embedded images: `attend sm_90a`, ... Empty if the library was built without kernels.
pub fn kernels() -> Vec<String> {
    let name = |image: &Image| match image.architecture {
        0 => format!("{} ptx compute_80", image.stem),
        90 => format!("{} sm_90a", image.stem),
        architecture => format!("{} sm_{architecture}", image.stem),
    };
    IMAGES.iter().map(name).collect()
}

/// Returns true if the library has kernels.
pub(crate) fn present() -> bool {
    !IMAGES.is_empty()
}

/// Stems of the embedded images.
pub(crate) fn stems() -> impl Iterator<Item = &'static str> {
    IMAGES.iter().filter(|image| image.architecture == 0).map(|image| image.stem)
}

/// The best image of a stem for a compute capability (times ten): [`nearest`].
pub(crate) fn choose(stem: &str, capability: u32) -> Option<&'static Image> {
    nearest(IMAGES.iter().filter(|image| image.stem == stem), capability)
}

/// Machine code of the same major and the nearest lower minor, else PTX.
fn nearest<'a>(images: impl Iterator<Item = &'a Image> + Clone, capability: u32) -> Option<&'a Image> {
    // sm_90a code runs on 9.0 only.
    let native = |image: &&Image| {
        image.architecture / 10 == capability / 10
            && image.architecture <= capability
            && (image.architecture != 90 || capability == 90)
    };
    images
        .clone()
        .filter(native)
        .max_by_key(|image| image.architecture)
        .or_else(|| images.clone().find(|image| image.architecture == 0 && capability >= PTX))
}

/// The compute capability (times ten) that a device's images were compiled for; 80 for PTX. PTX images use neither TMA nor
/// programmatic dependent launch.
pub(crate) fn architecture(capability: u32) -> Option<u32> {
    let compiled = |image: &Image| if image.architecture == 0 { PTX } else { image.architecture };
    stems().map(|stem| choose(stem, capability).map(compiled)).min().flatten()
}

/// Returns true if a device of this compute capability (times ten) runs machine code when it runs images of `architecture`;
/// false if that is PTX, which its driver compiles.
pub(crate) fn are_native(capability: u32, architecture: u32) -> bool {
    stems().all(|stem| choose(stem, capability).is_some_and(|image| image.architecture == architecture))
}

/// Returns true if kernels of this architecture use TMA: those compiled for compute capability 9.0.
pub(crate) fn has_tma(architecture: u32) -> bool {
    architecture == 90
}

/// The PTX image of a stem.
pub(crate) fn portable(stem: &str) -> Option<&'static Image> {
    IMAGES.iter().find(|image| image.stem == stem && image.architecture == 0)
}

impl Image {
    /// The inflated image.
    pub(crate) fn inflate(&self) -> Result<Vec<u8>> {
        match miniz_oxide::inflate::decompress_to_vec_with_limit(self.deflated, self.bytes) {
            Ok(bytes) if bytes.len() == self.bytes => Ok(bytes),
            _ => Err(Error::internal(format!("kernel image {} {} is damaged", self.stem, self.architecture))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_inflates() {
        for image in IMAGES {
            assert!(image.inflate().is_ok_and(|bytes| !bytes.is_empty()), "{} {}", image.stem, image.architecture);
        }
        for stem in stems() {
            assert!(choose(stem, 90).is_some() && choose(stem, 70).is_none(), "{stem}");
        }
        if present() {
            assert_eq!([110, 70].map(architecture), [Some(80), None]);
        }
    }

    #[test]
    fn every_capability_has_the_nearest_image() {
        let image = |architecture| Image { stem: "attend", architecture, bytes: 0, deflated: &[] };
        let images = [75, 80, 86, 90, 100, 120, 0].map(image);
        let nearest = |capability| nearest(images.iter(), capability).map(|image| image.architecture);
        for (capability, architecture) in [
            (75, 75),
            (80, 80),
            (86, 86),
            (87, 86),
            (89, 86),
            (90, 90),
            (100, 100),
            (103, 100),
            (110, 0),
            (120, 120),
            (121, 120),
        ] {
            assert_eq!(nearest(capability), Some(architecture), "{capability}");
        }
        assert_eq!(nearest(70), None);
    }
}
