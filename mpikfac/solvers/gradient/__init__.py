"""Solvers whose factors come from the averaged gradient, of which owners make the factors alone."""

from mpikfac.solvers.gradient.kl_shampoo import KLShampoo as KLShampoo
from mpikfac.solvers.gradient.muon import Muon as Muon
from mpikfac.solvers.gradient.shampoo import Shampoo as Shampoo
