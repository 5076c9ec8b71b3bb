"""Solvers whose factors come from the averaged gradient, of which owners make the factors alone."""

from mpikfac.solvers.gradient.kl_shampoo import KLShampoo as KLShampoo
from mpikfac.solvers.gradient.muon import Muon as Muon
from mpikfac.solvers.gradient.normuon import NorMuon as NorMuon
from mpikfac.solvers.gradient.shampoo import Shampoo as Shampoo
from mpikfac.solvers.gradient.soap import Soap as Soap
from mpikfac.solvers.gradient.soap import damped_squares as damped_squares
from mpikfac.solvers.gradient.soap import turned_back as turned_back
