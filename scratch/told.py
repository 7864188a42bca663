import sys, copy, math, time, torch
sys.path.insert(0,"/work/scratch")
from kink import *
class ToldBN(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, mu, inv):
        ctx.save_for_backward(x, w, mu, inv)
        return (x-mu)*inv*w[:,None,None]+b[:,None,None]
    @staticmethod
    def backward(ctx, g):
        x, w, mu, inv = ctx.saved_tensors
        xh = (x-mu)*inv
        gw = (g*xh).sum((0,2,3)); gb = g.sum((0,2,3))
        n = g.numel()/g.shape[1]
        gx = (g - (gb/n)[None,:,None,None] - xh*(gw/n)[None,:,None,None])*inv*w[:,None,None]
        return gx, gw, gb, None, None
class Told(nn.Module):
    tell = True
    def __init__(s, bn): super().__init__(); s.weight=bn.weight; s.bias=bn.bias; s.eps=bn.eps; s.mu=None; s.own=None
    def forward(s, x):
        m, v = x.mean((0,2,3),keepdim=True), x.var((0,2,3),unbiased=False,keepdim=True)
        if s.mu is None or not Told.tell:
            if s.mu is None: s.mu, s.inv, s.var = m.detach(), (v.detach()+s.eps).rsqrt(), v.detach()
            else: s.pen = ((m-s.mu).square().sum()/s.var.sum() + (v.add(s.eps).sqrt()-(s.var+s.eps).sqrt()).square().sum()/s.var.sum())
            return (x-m)*(v+s.eps).rsqrt()*s.weight[:,None,None]+s.bias[:,None,None]
        s.pen = ((m-s.mu).square().sum()/s.var.sum() + (v.add(s.eps).sqrt()-(s.var+s.eps).sqrt()).square().sum()/s.var.sum())
        return ToldBN.apply(x, s.weight, s.bias, s.mu, s.inv)
def swapbn(m):
    for n, c in m.named_children():
        if isinstance(c, nn.BatchNorm2d): setattr(m, n, Told(c))
        else: swapbn(c)

def run2(net, target, label, iters, lr, tvw, width, shape, truth=None, start=None, each=True, bn=0.1, seed=0, switch=1.0, drop=.1, l2=False):
    torch.manual_seed(seed)
    x = (0.5+0.25*torch.randn(shape)).clamp(0,1) if start is None else start.clone()
    x.requires_grad_()
    opt = torch.optim.Adam([x], lr=lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(opt, [int(iters*a) for a in (3/8,5/8,7/8)], gamma=drop)
    ps = list(net.parameters()); bns=[m for m in net.modules() if isinstance(m,Told)]
    best=9e9
    for i in range(iters):
        Kink.width = width
        Told.tell = i < switch*iters
        if i == int(switch*iters): best=9e9
        loss = F.cross_entropy(net(x), label)
        g = torch.autograd.grad(loss, ps, create_graph=True)
        if each:
            m = sum(1-F.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a,b in zip(g,target))/len(ps)
        elif l2: m = sum((a-b).square().sum() for a,b in zip(g,target))/sum(b.square().sum() for b in target)
        else:
            dot = sum((a*b).sum() for a,b in zip(g,target)); na = sum(a.square().sum() for a in g).sqrt(); nb = sum(b.square().sum() for b in target).sqrt()
            m = 1 - dot/(na*nb)
        pen = sum(b.pen for b in bns)/max(1,len(bns)) if bns else 0.
        tot = m + tvw*tv(x) + bn*pen
        (gx,) = torch.autograd.grad(tot, [x])
        if float(tot) < best: best, bx, bm, bp = float(tot), x.detach().clone(), float(m), float(pen)
        x.grad = gx.sign(); opt.step(); sched.step()
        with torch.no_grad(): x.clamp_(0,1)
    Kink.width=None
    return bx, (bm, bp)
def one(c, mode, trained, data, model="relu", images=None, batch=1, arch="resnet20"):
    images = images or image_set(data, (c+1)*batch, "choose")
    net, acc = network_of(arch,"relu",trained,1000+c); net=copy.deepcopy(net); swap(net)
    x = images.images[c*batch:(c+1)*batch].expand(-1,3,-1,-1).contiguous(); y=images.labels[c*batch:(c+1)*batch]
    if mode=="train": net.train(); swapbn(net)
    else: net.eval()
    Kink.width=None
    tg=[g.detach() for g in torch.autograd.grad(F.cross_entropy(net(x),y), list(net.parameters()))]
    return net, tg, x, y
if __name__=="__main__":
    mode, trained, count, iters, data = sys.argv[1], sys.argv[2]=="trained", int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    for v in eval(sys.argv[6]):
        out=[]; t=time.process_time()
        for c in range(count):
            net,tg,x,y=one(c,mode,trained,data)
            r,m=run2(net,tg,y,iters,shape=x.shape,truth=x,**v)
            out.append((round(-10*math.log10(float((r-x).square().mean())),1), round(float(torch.corrcoef(torch.stack([r.flatten(),x.flatten()]))[0,1]),2), tuple(round(float(k),4) for k in m)))
        print(mode,trained,v,out,"cpu %.0f"%((time.process_time()-t)/count),flush=True)
