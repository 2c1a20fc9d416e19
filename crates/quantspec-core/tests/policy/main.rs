//! The γ policy on simulated machines and texts.

mod gamma;
mod methods;
mod pages;
mod world;
