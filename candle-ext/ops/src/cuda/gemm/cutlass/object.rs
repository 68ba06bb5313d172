//! Shared objects of CUTLASS's tiles, loaded at run time on first use. `call.h` has their interface.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use libloading::Library;

use crate::cuda::DeviceAddress;
use crate::grouped_tile::{GroupedTile, TileUse};

/// Version of the interface, as in call.h.
const ABI: c_uint = 1;

/// Size of the error message buffer in bytes.
const MESSAGE: usize = 512;

/// A call. Same layout as in call.h.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CutlassCall {
    pub(super) sizes: DeviceAddress,
    pub(super) addresses: [DeviceAddress; 3],
    pub(super) strides: [DeviceAddress; 3],
    /// Zero in a call that only queries the workspace's size.
    pub(super) workspace: DeviceAddress,
    pub(super) stream: *mut c_void,
    pub(super) n_groups: i32,
    pub(super) n_multiprocessors: i32,
    pub(super) beta: f32,
}

const _: () = assert!(size_of::<CutlassCall>() == 88);

/// Kernel of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileKernel {
    Y,
    X,
    GradWF32,
    GradWBf16,
}

impl TileKernel {
    fn of(usage: TileUse) -> [Self; 2] {
        match usage {
            TileUse::Multiply => [Self::Y, Self::X],
            TileUse::GradW => [Self::GradWF32, Self::GradWBf16],
        }
    }

    fn symbol(self) -> &'static str {
        match self {
            Self::Y => "candlewick_cutlass_y",
            Self::X => "candlewick_cutlass_x",
            Self::GradWF32 => "candlewick_cutlass_w_f32",
            Self::GradWBf16 => "candlewick_cutlass_w_bf16",
        }
    }
}

type Submit = unsafe extern "C" fn(*const CutlassCall, *mut usize, *mut c_char, usize) -> c_int;

/// Object of a tile, which stays loaded.
pub(crate) struct TileObject {
    kernels: [(TileKernel, Submit); 2],
    /// Versions of CUTLASS and of the compiler.
    pub(crate) build: String,
    _library: Library,
}

/// Returns a tile's object, loaded from the program's folder, or the reason why it is unusable. A tile is looked for once.
#[cfg(feature = "cuda")]
pub(crate) fn object(tile: &'static GroupedTile) -> Result<&'static TileObject, String> {
    use std::collections::HashMap;
    use std::sync::{Mutex, PoisonError};

    use crate::grouped_tile::folder;

    type Loaded = HashMap<&'static str, Result<&'static TileObject, String>>;
    static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let loaded = loaded.get_or_insert_default();
    let open = || TileObject::open(&folder(), tile).map(|object| &*Box::leak(Box::new(object)));
    loaded.entry(tile.name).or_insert_with(open).clone()
}

impl TileObject {
    /// Loads a tile's object from a folder.
    fn open(folder: &Path, tile: &GroupedTile) -> Result<Self, String> {
        let path = folder.join(format!("{}.so", tile.name));
        let again = format!("compile it again: scripts/build-cutlass {} {}", folder.display(), tile.name);
        let path_name = path.display();
        if !path.exists() {
            return Err(format!(
                "there is no object of the tile {} ({path_name}): scripts/build-cutlass DIR {} compiles it, and \
                 CANDLEWICK_CUTLASS=DIR names its folder",
                tile.name, tile.name
            ));
        }
        // SAFETY: initializers of the object register its kernels; they have no preconditions.
        let library = unsafe { Library::new(&path) }
            .map_err(|error| format!("{path_name} cannot be loaded: {}", cause(&error)))?;
        let missing =
            |error: libloading::Error| format!("{path_name} is no tile of CUTLASS: {}; {again}", cause(&error));
        // SAFETY: call.h declares these functions so in every version.
        let abi = unsafe { library.get::<extern "C" fn() -> c_uint>("candlewick_cutlass_abi").map_err(missing)?() };
        if abi != ABI {
            return Err(format!(
                "{path_name} has version {abi} of the interface, and this program wants {ABI}; {again}"
            ));
        }
        // SAFETY: call.h declares the functions so in this version.
        let [line, build] = unsafe {
            let string_of = |name: &str| {
                let function = library.get::<extern "C" fn() -> *const c_char>(name).map_err(missing)?;
                Ok::<_, String>(text(function()))
            };
            [string_of("candlewick_cutlass_tile")?, string_of("candlewick_cutlass_build")?]
        };
        // Rows, columns and schedule of a tile may be changed without another build of the program.
        let is_same = line.split(' ').take(2).eq(tile.line().split(' ').take(2));
        if !is_same {
            return Err(format!("{path_name} is the tile `{line}`, and this program wants `{}`; {again}", tile.line()));
        }
        if line != tile.line() {
            tracing::warn!("experts: {path_name} is the tile `{line}`; this program's table has `{}`", tile.line());
        }
        let [first, second] = TileKernel::of(tile.usage);
        // SAFETY: as above.
        let find = |kernel: TileKernel| unsafe {
            Ok::<_, String>((kernel, *library.get::<Submit>(kernel.symbol()).map_err(missing)?))
        };
        Ok(Self { kernels: [find(first)?, find(second)?], build, _library: library })
    }

    /// Launches a kernel if the call has a workspace. Returns the workspace's size, or CUTLASS's message.
    ///
    /// # Safety
    ///
    /// The call's addresses must be valid for its groups, and the workspace must have the returned size.
    pub(super) unsafe fn submit(&self, kernel: TileKernel, call: &CutlassCall) -> Result<usize, String> {
        let of_tile = self.kernels.iter().find(|(known, _)| *known == kernel);
        let (_, submit) = of_tile.ok_or_else(|| format!("the tile has no kernel {}", kernel.symbol()))?;
        let (mut workspace_bytes, mut message) = (0, [0; MESSAGE]);
        // SAFETY: the caller guarantees valid addresses; the size and the message can be written.
        match unsafe { submit(call, &raw mut workspace_bytes, message.as_mut_ptr(), MESSAGE) } {
            0 => Ok(workspace_bytes),
            _ => Err(text(message.as_ptr())),
        }
    }
}

/// Returns the loader's own message, which names the file or the function.
fn cause(error: &libloading::Error) -> String {
    std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string)
}

/// Copies a text of C, which ends with a zero.
fn text(at: *const c_char) -> String {
    // SAFETY: texts of an object are constants, and a message was zeros before snprintf wrote it.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(super) mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    /// Folder with objects of stand-ins, which are compiled now. It is removed at the end.
    pub(crate) struct Objects(pub(crate) PathBuf);

    impl Objects {
        pub(crate) fn new(test: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("candlewick-tiles-{}-{test}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            Self(folder)
        }

        /// Compiles the object of a tile with these macros.
        pub(crate) fn put(&self, tile: &GroupedTile, line: &str, macros: &[&str]) {
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand-in/cutlass.cpp");
            let mut compile = Command::new(option_env!("CXX").unwrap_or("c++"));
            compile.args(["-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]).args(macros);
            compile.arg(format!("-DCANDLEWICK_TILE=\"{line}\"")).arg(source).arg("-o");
            let status = compile.arg(self.0.join(format!("{}.so", tile.name))).status().unwrap();
            assert!(status.success());
        }

        #[track_caller]
        fn check_error(&self, tile: &GroupedTile, parts: &[&str]) {
            let error = TileObject::open(&self.0, tile).err().unwrap();
            for part in parts {
                assert!(error.contains(part), "{part}: {error}");
            }
        }
    }

    impl Drop for Objects {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn call(n_groups: i32) -> CutlassCall {
        CutlassCall {
            sizes: 1,
            addresses: [2, 3, 4],
            strides: [5, 6, 7],
            workspace: 0,
            stream: std::ptr::null_mut(),
            n_groups,
            n_multiprocessors: 132,
            beta: 0.5,
        }
    }

    #[test]
    fn an_object_is_called_with_the_layout_of_its_header() {
        let objects = Objects::new("call");
        let tile = GroupedTile::named("128x256").unwrap();
        objects.put(tile, &tile.line(), &["-DSTAND_IN_MULTIPLY"]);
        let object = TileObject::open(&objects.0, tile).unwrap();
        assert_eq!(object.build, "a stand-in");
        // SAFETY: the stand-in reads the call alone.
        let submitted = unsafe { [TileKernel::Y, TileKernel::X].map(|kernel| object.submit(kernel, &call(9))) };
        // The stand-in adds the fields, each times its number.
        let sum = 1 + 2 * 2 + 3 * 3 + 4 * 4 + 5 * 5 + 6 * 6 + 7 * 7 + 10 * 9 + 11 * 132 + 6;
        assert_eq!(submitted, [Ok(sum), Ok(sum + 1)]);
        // SAFETY: as above.
        let refused =
            unsafe { [object.submit(TileKernel::Y, &call(-1)), object.submit(TileKernel::GradWF32, &call(1))] };
        assert_eq!(refused[0], Err("n_groups is -1".into()));
        assert_eq!(refused[1], Err("the tile has no kernel candlewick_cutlass_w_f32".into()));
    }

    #[test]
    fn an_object_that_does_not_fit_is_an_error_with_its_remedy() {
        let objects = Objects::new("errors");
        let (tile, dw) = (GroupedTile::named("256x128").unwrap(), GroupedTile::named("dw-128x256").unwrap());
        let path = objects.0.join("256x128.so");
        let path = path.to_str().unwrap();
        let remedy = "scripts/build-cutlass";
        objects.check_error(tile, &["there is no object of the tile 256x128", path, remedy, "CANDLEWICK_CUTLASS=DIR"]);
        std::fs::write(path, "no object").unwrap();
        objects.check_error(tile, &["cannot be loaded: /", path]);
        objects.put(tile, &tile.line(), &["-DSTAND_IN_EMPTY"]);
        objects.check_error(tile, &["256x128.so is no tile of CUTLASS", "candlewick_cutlass_abi", remedy]);
        objects.put(tile, &tile.line(), &["-DSTAND_IN_MULTIPLY", "-DSTAND_IN_ABI=7"]);
        objects.check_error(tile, &["has version 7 of the interface, and this program wants 1", "256x128", remedy]);
        objects.put(tile, &dw.line(), &["-DSTAND_IN_MULTIPLY"]);
        objects
            .check_error(tile, &["is the tile `dw-128x256 dw", "wants `256x128 multiply 256x128x64 2x1 Cooperative`"]);
        // Another schedule is no fault.
        objects.put(tile, "256x128 multiply 256x128x128 1x2 Pingpong", &["-DSTAND_IN_MULTIPLY"]);
        assert!(TileObject::open(&objects.0, tile).is_ok());
        objects.put(dw, &dw.line(), &["-DSTAND_IN_MULTIPLY"]);
        objects.check_error(dw, &["dw-128x256.so is no tile of CUTLASS", "candlewick_cutlass_w_f32", remedy]);
    }

    #[test]
    fn the_header_has_this_version_of_the_interface() {
        let header = include_str!("call.h");
        assert!(header.contains(&format!("#define CANDLEWICK_CUTLASS_ABI {ABI}\n")));
        assert!(header.contains(&format!("sizeof(CandlewickGroupedCall) == {}", size_of::<CutlassCall>())));
        for kernel in [TileUse::Multiply, TileUse::GradW].map(TileKernel::of).concat() {
            let form = kernel.symbol().trim_start_matches("candlewick_cutlass_");
            assert!(header.contains(&format!("CANDLEWICK_FORM({form});")), "{form}");
        }
    }
}
