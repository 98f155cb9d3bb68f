//! Links the unwinder into the payload, so that it needs nothing but libc at run time, and finds frida's devkit.
//!
//! rustc asks the linker for `-lgcc_s`. A linker script of that name, found first, answers with the static library that
//! comes with the same compiler.

use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(std::env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    std::fs::write(out.join("libgcc_s.so"), "GROUP ( -lgcc_eh -lgcc )\n")
        .expect("writing the linker script");
    println!("cargo::rustc-link-search=native={}", out.display());
    if std::env::var_os("CARGO_FEATURE_FRIDA").is_some() {
        // gum wants two functions of libm that libc has as well.
        std::fs::write(out.join("libm.so"), "GROUP ( -lc )\n").expect("writing the linker script");
    }
    println!("cargo::rerun-if-env-changed=FRIDA_GUM_DEVKIT");
    if let Ok(devkit) = std::env::var("FRIDA_GUM_DEVKIT") {
        // Where `libfrida-gum.a` is.
        println!("cargo::rustc-link-search=native={devkit}");
    }
}
